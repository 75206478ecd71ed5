"""The HTTP interface of an engine: OpenAI's routes over the `Client` of serving/client.py. It needs the extra `serve`.

app = make_app(client, vocabulary, Options(models={"tiny": None}, keys=("secret",)))        app.py
await run_server(app, host="127.0.0.1", port=8000)                                          server.py
"""
