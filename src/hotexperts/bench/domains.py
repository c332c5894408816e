"""Texts of several kinds, for models whose routers listen to what they read."""

DOMAINS = {
    "prose": """The ferry left before the fog had lifted. Two fishermen stood at the
rail and did not speak, for each of them had said all he knew about the weather on the day
before. Behind them the town drew back into the grey, first the boats, then the white wall
of the harbour, and last the light on the hill, which nobody had remembered to put out. A
child counted the gulls aloud, lost her place at nineteen, and began again. When the engine
changed its note, the older man lifted his head. There was an island where the chart had
none, low and green, with a single chimney, and smoke rose from it as straight as a pencil
line.""",
    "code": """import heapq


def shortest(graph, start):
    \"\"\"Distances from one node to all others, by Dijkstra's method.\"\"\"
    distance = {start: 0}
    queue = [(0, start)]
    while queue:
        so_far, node = heapq.heappop(queue)
        if so_far > distance[node]:
            continue
        for neighbour, length in graph[node].items():
            candidate = so_far + length
            if candidate < distance.get(neighbour, float("inf")):
                distance[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distance


class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right
""",
    "mathematics": """Let n be an integer that is at least 2. We show that n has a prime
divisor. Take the smallest divisor d of n with d > 1; it exists, because n divides itself.
If d = a * b with both a > 1 and b > 1, then a divides n and a < d, which contradicts the
choice of d. Hence d is prime. Now suppose that there were only finitely many primes p1,
..., pk, and put m = p1 * ... * pk + 1. Some prime q divides m, but m leaves the remainder 1
when it is divided by any pi, so q is none of them. Therefore the set of primes is infinite.
For example, 2 * 3 * 5 * 7 + 1 = 211, and 211 is prime, while 2 * 3 * 5 * 7 * 11 * 13 + 1 =
30031 = 59 * 509.""",
    "dialogue": """Customer: My order arrived this morning, but the lamp is the wrong colour.
Support: I am sorry to hear that. Could you tell me the number on the invoice?
Customer: It is 40917. I asked for blue and got green.
Support: Thank you, I see it. I can send the blue one today, or refund the price. Which do you like?
Customer: Please send the blue one. Do I have to return the other?
Support: No, keep it or give it away. The parcel should reach you by Thursday.
Customer: That is kind of you. Is there anything to sign?
Support: Nothing at all. You will get a message with the tracking link within the hour.""",
}
