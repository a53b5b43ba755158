"""Amazon Web Services: an EKS cluster whose GPU nodes use EFA, with S3 and FSx for Lustre."""
