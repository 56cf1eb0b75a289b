"""KV memory as the queue's policy sees it: what devices hold, what models want, what requests will need."""
