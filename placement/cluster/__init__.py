"""What placement knows of the cluster: groups, loaders, catalogues as they were last heard; and the routes of that."""
