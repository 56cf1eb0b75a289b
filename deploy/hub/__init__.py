"""Models of the Hugging Face hub, fetched ahead of serving into the library's cache: `prism fetch`, `prism serve`.

The loader reads folders and knows no network.

names       which words are names of models of the hub
files       which files of a repository are a model's
fetching    from a name to a folder: config.json is checked, then the disk's space, then weights come
progress    what is shown meanwhile: a bar on a terminal, elsewhere a line now and then
faults      what went wrong, in one line
__main__    the command line, which others run as a process of its own, that can be ended at any time
"""
