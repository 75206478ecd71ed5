"""Many engines behind one address: which replica a request goes to, and how it gets there. Nothing here imports Ray.

prefix.py     keys of a prompt's prefixes; the replica whose prefix cache has most of it
relay.py      the app before the replicas: it checks a request, passes it on, and tries again where a replica is lost
answer.py     a request in the replica: the app of serving/http on a call that came without a socket
merge.py      the metrics of all replicas in one page
"""
