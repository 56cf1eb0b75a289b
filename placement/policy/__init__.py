"""What placement decides, without I/O or a clock: times are arguments, decisions are values.

kvpr        facts about models, devices and groups; demand; pressure
window      token rates over 60 s, with a fast-rising short window beside it
assign      Algorithm 1: which model lives where; `field` is the cluster as arrays
improve     local search behind it, within a number of steps; room for models that packing leaves out
standing    the groups kept between decisions: activation among thousands of them
footing     what of a group matters to a model that waits, and for how long that holds
lifecycle   activation on one group: whether a model can come up there, and who leaves for it
eviction    who leaves when memory is wanted
refusal     why no group could ever hold a model
moves       from where models are to where they should be, feasible at every step
"""
