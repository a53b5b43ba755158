"""Amazon Web Services: an EKS cluster whose GPU nodes speak EFA, with S3 and FSx for Lustre beside it."""
