"""Several processes that serve one model: routing by computed prefixes, and answers that survive a lost replica.

    wire        requests, events and errors as JSON
    routing     which replica takes a request: a pure function
    replay      an answer that is computed again and must be equal
    pool        what a server submits requests to, in place of one engine
    replica     one engine as others see it
    local       replicas as processes of this machine
    ray_app     replicas as a Ray Serve application

Only `ray_app` imports Ray, and nothing outside this package imports `ray_app` before it is asked for.
"""
