"""The speech endpoint that scripts for this model already use, and a page to listen on, over `music3`.

    python -m client.gateway --url localhost:8001        http://127.0.0.1:8080/

One process, one event loop, one gRPC connection; it holds no model and computes nothing but audio formats.
Needs the extra `gateway` beside what the client needs.
"""
