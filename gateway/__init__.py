"""The gateway: HTTP and gRPC in, tokens out. It owns nothing worth keeping; any number of them may run.

How a request is served, step by step:

    1. app.py, openai/ or grpc_api.py   a body or message comes in, and access/ says whether it may
    2. openai/bodies.py                 it is checked and becomes a `request`
    3. serving.py                       its route is looked up, its prompt tokenized (text/tokenizers.py) and checked
    4. routing/relay.py                 a place is found: in the routes that placement streams, or by an activation
    5. routing/groups.py                it is sent over the stream to its group; all requests' tokens come back on it
    6. served.py, text/answer.py        tokens become text, cut at stop strings; calls of tools are found in it (tools/)
    7. http/sse.py                      text becomes events

Apart from that path, `ui/` is a page for people who look at the system.

Words: a *request* asks for one or more *answers* (choices); a *job* is one answer to be made; an *attempt* is one
sending of a job to a *place*, which is a model on a group. When a place fails the job goes on at another: its client
sees a pause.
"""
