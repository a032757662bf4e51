"""Where a run stands on AWS: what machines are, and the objects that bring a run up on Amazon EKS.

Knows recipes and models' shapes. Starts nothing and asks no cloud: it says, in files, what a person applies.
"""
