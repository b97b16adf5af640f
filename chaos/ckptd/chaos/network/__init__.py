"""The network between the nodes of a run, and what can be done to it.

Two ways with one interface (`way`): real network namespaces with a router between them (`netns_way`, `hub`), and
TCP proxies in front of agents and store (`proxy_way`, `relay`).
"""
