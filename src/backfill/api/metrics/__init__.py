"""What ``/metrics`` exposes of a server. What a router has too is in ``http.metrics``."""
