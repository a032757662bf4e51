"""Versions that the objects of a cluster name, each with where it comes from."""

RAY = "2.60.0"  # of the images; token authentication needs 2.52 or newer
KUBERAY_CHART = "1.7.1"  # `authOptions` came with 1.5.1
EFA_PLUGIN = "v0.5.20"  # the one of AWS' own description of such a cluster
NVIDIA_PLUGIN_CHART = "0.19.2"
