"""One file, prism.toml, that describes a node, and the files of its services that are made of it.

description   what the file may say
services      the services of a node and their settings: how they find each other is written here only
targets       where they lie for systemd, compose, Kubernetes and `prism serve`, and what is wrong with a description
consistency   which class checks each service's settings, and whether those of one system agree
reading       the file, with a line for each thing that is wrong
render        the files for a target
systemd       the units, made of the shipped ones
compose       the compose file, made of the shipped one
kubernetes    the manifests, made of the shipped ones
yaml_text     YAML for people
schema        the JSON schema of the file, for editors

`deploy.local` makes its own files of `services` too; the command line is `deploy.config`.
"""
