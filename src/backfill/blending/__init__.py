"""The plan of an offline pool: which request runs next, so that compute and memory are used evenly."""
