"""How many of each, and when: keeps the rate of generation and the rate of training in balance.

`policy` decides and is pure; `simulate` runs it on simulated time.
"""
