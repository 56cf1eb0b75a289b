"""Ways to run Prism: `local` on one machine for a person at a terminal; the others are files for their own tools.

node              one file, prism.toml, that describes a node, and the files that are made of it
hub               models of the Hugging Face hub, fetched ahead
engine_packages   the packages of an engine, for this machine
config            the command `prism config`
places            where commands read and write, in a checkout and elsewhere
healthy           whether a service is healthy
__main__          the command `prism`
"""
