with pytest.raises(RuntimeError) as caught:
    next(iter(DataLoader(photos, 4, on_error="replace")))
(note,) = caught.value.__notes__
assert note.startswith(
    "(sample 0 '00.tar @ 0' is a list of 1 at ['json']['boxes'], but sample 1 '00.tar @ "
), note
