package embedded

import _ "embed"

// natsAccounts is the part of the NATS server's configuration that says which identity may use which subjects.
//
//go:embed accounts.conf
var natsAccounts string
