"""The promises of this project as a policy pack: they hold for whatever is added to a stack, by whomever."""
