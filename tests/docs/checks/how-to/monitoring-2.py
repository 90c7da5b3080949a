import prometheus_client

serve = prometheus_client.start_http_server
prometheus_client.start_http_server = lambda port: serve(0, "127.0.0.1")  # another program may have this port
