import os

import fastload

os.mkdir("mount")
os.chmod("mount", 0o777)  # as kubelet makes an emptyDir
try:
    fastload.Cache("mount")
except fastload.errors.CacheError as error:
    print(error)  # is writable for everybody
else:
    raise AssertionError
fastload.Cache("mount/fastload", size_limit="450GB")._open_or_raise()
assert os.stat("mount/fastload").st_mode & 0o777 == 0o700
