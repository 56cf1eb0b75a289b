"""The gateway: HTTP and gRPC in, tokens out. It owns nothing worth keeping; any number of them may run.

A request's way, each step in the file of its name:

    1. app, completions, inference   a body or message comes in
    2. openai                        it is checked and becomes a `request`
    3. serving                       its route is looked up, its prompt tokenized (`tokenizer`), its limits checked
    4. relay                         a place is found: in the `routes` that placement streams, or by an `activation`
    5. groups                        it travels over the one stream to its group; tokens of all come back on it
    6. answer                        tokens become text (`detokenizer`), cut at stop strings (`stops`); calls of
                                     tools are found in it (`tools/`)
    7. sse                           text becomes events

Beside that way, `ui/` is a page for people who look at the system.

Words: a *request* asks for one or more *answers* (choices); a *job* is one answer to be made; an *attempt* is one
sending of a job to a *place*, which is a model on a group. When a place fails the job goes on at another: its client
sees a pause.
"""
