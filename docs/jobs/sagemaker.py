"""A training job of SageMaker: `python sagemaker.py`, after its names are yours.

The bucket has a wheel of peagle in code/ and answers.jsonl in data/. Checkpoints go to runs/, which
SageMaker copies back when a spot instance was taken away or the same job is started again.
"""

import time

import boto3

REGION, NODES, GPUS = "us-west-2", 2, 8
BUCKET, ROLE = "s3://my-bucket", "arn:aws:iam::123456789012:role/my-role"
# AWS's PyTorch (aws.github.io/deep-learning-containers/pytorch/deployment/sagemaker).
IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.11-cu130-amzn2023-sagemaker"
INPUT, RUN = "/opt/ml/input/data", "/opt/ml/checkpoints"
HOSTS = "/opt/ml/input/config/resourceconfig.json"
# Prints this node's number. A host name is set by the image's entry point, which is not run here.
RANK = f"import json; c = json.load(open('{HOSTS}')); print(c['hosts'].index(c['current_host']))"
START = f'pip install {INPUT}/code/*.whl && exec torchrun --node-rank $(python3 -c "{RANK}") "$@"'
ARGUMENTS = (
    f"--nnodes {NODES} --nproc-per-node {GPUS} --master-addr algo-1 --master-port 29500 "
    f"-m peagle train my-org/my-model --data {INPUT}/data/answers.jsonl --output {RUN} "
    "--batch 64 --resume auto"
)


def channel(name: str) -> dict:
    source = {"S3DataType": "S3Prefix", "S3Uri": f"{BUCKET}/{name}/"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def request() -> dict:
    return {
        "TrainingJobName": f"peagle-{time.strftime('%Y%m%d-%H%M%S')}",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c"],
            # Each has at most 256 characters. The second is the shell's $0.
            "ContainerArguments": [START, "peagle", *ARGUMENTS.split()],
        },
        # Seconds for a checkpoint: torchrun's own would be 30, SageMaker's are 120.
        "Environment": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110"},
        "InputDataConfig": [channel("code"), channel("data")],
        "OutputDataConfig": {"S3OutputPath": f"{BUCKET}/output/"},
        "CheckpointConfig": {"S3Uri": f"{BUCKET}/runs/mine/", "LocalPath": RUN},
        "ResourceConfig": {
            "InstanceType": "ml.p5en.48xlarge",
            "InstanceCount": NODES,
            "VolumeSizeInGB": 500,
        },
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 172800},
    }


if __name__ == "__main__":
    job = request()
    boto3.client("sagemaker", region_name=REGION).create_training_job(**job)
    print(job["TrainingJobName"])
