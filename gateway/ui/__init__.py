"""The gateway's page: memory, queues, moves and targets of the whole system, for a person who looks.

access    who may see it: the one place where that is decided
look      one look at the system: asks placement, and the groups that have queues
live      looks every second while there are viewers, and not at all otherwise
state     the services' answers as plain values: the page's JSON
pages     the paths: the page's files, that JSON once, and the same as a stream of events
static/   HTML, CSS and JavaScript as the browser takes them
"""
