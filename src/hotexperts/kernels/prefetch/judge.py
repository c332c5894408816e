"""A layer's switch as device code: off where guesses are good for nothing, tried again at times.

`predict.control` is the specification; here its numbers are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotexperts.predict import control

WASTE_PRICE: tl.constexpr = tl.constexpr(control.WASTE_PRICE)
MEMORY: tl.constexpr = tl.constexpr(control.MEMORY)
OFF_BELOW: tl.constexpr = tl.constexpr(control.OFF_BELOW)
ON_ABOVE: tl.constexpr = tl.constexpr(control.ON_ABOVE)
FIRST_REST: tl.constexpr = tl.constexpr(control.FIRST_REST)
MOST_REST: tl.constexpr = tl.constexpr(control.MOST_REST)


@triton.jit
def record_switch(at, num_issued, num_used):
    """One call of the layer, by one program."""
    is_on = tl.load(at) > 0
    payoff, trial = tl.load(at + 1), tl.load(at + 2)
    rest, next_rest = tl.load(at + 3), tl.load(at + 4)
    worth = num_used - WASTE_PRICE * (num_issued - num_used)
    payoff += tl.where(is_on, (worth - payoff) / MEMORY, 0.0)
    ends = is_on & (trial == 1)
    falls = is_on & (payoff < tl.where(ends, ON_ABOVE, OFF_BELOW))
    rest_left = tl.where(is_on, rest, rest - 1)
    tried = (is_on == 0) & (rest_left == 0)
    tl.store(at, ((is_on & (falls == 0)) | tried).to(tl.float32))
    tl.store(at + 1, tl.where(tried, ON_ABOVE, payoff))
    trial_left = tl.where(falls, 0.0, tl.maximum(trial - 1, 0.0))
    tl.store(at + 2, tl.where(tried, MEMORY, tl.where(is_on, trial_left, trial)))
    tl.store(at + 3, tl.where(falls, next_rest, rest_left))
    doubled = tl.minimum(2 * next_rest, MOST_REST)
    first = ends & (falls == 0)
    tl.store(at + 4, tl.where(falls, doubled, tl.where(first, FIRST_REST, next_rest)))
