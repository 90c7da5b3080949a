import json


def fails(index):
    raise json.JSONDecodeError("three arguments", "{", 0)  # torch raises RuntimeError


with pytest.raises(json.JSONDecodeError) as caught:
    all_of(fails)
assert str(caught.value.__cause__).endswith("(sample 0)\n"), caught.value.__cause__


def stops(index):
    raise StopIteration


with pytest.raises(RuntimeError):
    all_of(stops)
with pytest.raises(Exception, match="pickle"):
    all_of(lambda index: lambda: None, collate_fn=lambda samples: samples)
with pytest.raises(RuntimeError) as caught:
    all_of(lambda index: torch.zeros(index + 1))
said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
assert "sample 0" in said and "sample 1" in said, said
with pytest.raises(ValueError, match="sample 1"):
    all_of(odd)
