"""torch's DataLoader over an S3 client in `__getitem__`, one client a worker: mode "s3fs" or "boto3"."""

import torch
from _serve import decode, keys, s3_client, serve


class Bucket(torch.utils.data.Dataset):
    def __init__(self, job):
        self.job, self.keys, self.read = job, keys(job), None

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        self.read = self.read or {"s3fs": s3fs_reader, "boto3": boto3_reader}[self.job.mode](self.job)
        key, label = self.keys[index]
        return torch.from_numpy(decode(self.read(key), self.job.size)), label


def s3fs_reader(job):
    import s3fs

    # In parts, as by default, it asks for the size of an object first.
    fs = s3fs.S3FileSystem(endpoint_url=job.endpoint, key=job.key, secret=job.secret, max_concurrency=1)
    return lambda key: fs.cat_file(f"{job.bucket}/{key}")


def boto3_reader(job):
    client = s3_client(job)
    return lambda key: client.get_object(Bucket=job.bucket, Key=key)["Body"].read()


def start(job):
    loader = torch.utils.data.DataLoader(Bucket(job), job.batch, shuffle=True, num_workers=job.workers)
    return lambda: (len(images) for images, _ in loader)


if __name__ == "__main__":
    serve(start, "torch", "s3fs", "boto3", "pillow-simd")
