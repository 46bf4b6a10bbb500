package embedded

import _ "embed"

// natsAccounts is the accounts section of the NATS server's configuration: the subjects that each identity may use.
//
//go:embed accounts.conf
var natsAccounts string

// logAccount is the account of the event logs.
const logAccount = "log"
