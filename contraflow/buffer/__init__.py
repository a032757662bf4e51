"""Holds experience between the pools: tickets, the window that bounds age, and the durable ledger of every group."""
