"""The shims of a page's commands end as the commands do, and signals reach these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PAGE = """
<!-- save as: end.py -->
```python
import os, sys, time
from pathlib import Path

how, = sys.argv[1:]
if how == "wait":
    Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
if how == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(how))
```

```bash
code() { "$@" || echo $?; }
test "$(code python end.py 7)" = 7
test "$(code python -u end.py kill)" = 137
test "$(code fastload nothing)" = 2
test "$(echo words | python -c 'print(input())')" = words
for signal in TERM:143 KILL:137; do
    python end.py wait &
    until test -s pid; do sleep 0.02; done
    kill -${signal%:*} $!
    ended=0; wait $! || ended=$?
    test $ended = ${signal#*:}
    while kill -0 $(cat pid); do sleep 0.02; done
    rm pid
done
```
"""


def test_commands_end_as_for_a_reader(run: Callable[[Path], None], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    run(page)
