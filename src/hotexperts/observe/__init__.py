"""What a cache counts, for people and machines that watch: reads counters, changes nothing."""
