"""What placement knows of the cluster: groups, loaders, their catalogues as they were last heard, and the routes."""
routes."""
