"""What placement knows of the cluster: groups, loaders and catalogues as they were last heard, and the routes that
follow."""
