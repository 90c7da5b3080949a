import io, sys

printed = sys.stdout
sys.stdout = io.StringIO()
