try:
    TestNoisy().test_same_seed_gives_the_same_samples()
except AssertionError as error:
    assert "sample 0 at [1] is 0." in str(error) and "from the next dataset of make()" in str(error)
else:
    raise RuntimeError("the fault was not found")
