try:
    open_store("gs://bucket", token={"client_email": "x"})
except ValueError as error:
    assert "token must be 'anon' or the path" in str(error)
else:
    raise AssertionError
