output, sys.stdout = sys.stdout.getvalue(), printed
assert '"name": "fastload.wait.batches"' in output and '"unit": "{batch}"' in output, output
assert '"fastload.loader": "train"' in output and '"fastload.rank": 0' in output
