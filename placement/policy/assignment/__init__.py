"""Which model is on which group (the paper's Algorithm 1), and the moves that get there.

assign              models to groups, greedily, by pressure
improve             local search behind it, within a number of steps; room for models that packing leaves out
repartition         the best division of a few models between two places
partition           a cluster that is divided once, for systems that plan ahead
rebalance, rounds   which moves are wanted, and whether a round of them is worth it
moves, cool_down    the order of moves, feasible at every step, and how long a model stays after one
"""
