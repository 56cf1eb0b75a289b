"""KV memory as the queue's policy sees it: what devices hold, what each model demands, what requests will need."""
