"""What a gpu_scheduler decides, without I/O or a clock: times are arguments, decisions are values.

slack           facts about a request, what it costs, the time it has left
moore_hodgson   the largest set of requests that all meet their deadlines
backlog         the shared queue; `plan(now)` orders it
holdings        what devices hold, as admission counts it
admission       which of the ordered requests may start now, given memory and the prefill turn

agenda = backlog.plan(now)                      # agenda.decisions: Drop, Expire, already carried out in the queue
for decision in admit(agenda, backlog, memory, turn):
    if isinstance(decision, Start):
        backlog.start(decision, now)            # then send it; a NeedMemory goes to the limits
wake the dispatcher at backlog.next_deadline()
"""
