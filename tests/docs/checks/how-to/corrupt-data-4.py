import json, subprocess

warm = "fastload warm s3://bucket/train --cache /ssd/cache --mode shrunk --num-workers 2 --json"
