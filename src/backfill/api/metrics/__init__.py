"""What ``/metrics`` exposes. Every metric is defined in this package, once."""
