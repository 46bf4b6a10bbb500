// Package rpc is the transport between services: gRPC with mutual TLS. Unix sockets have only the handshake of TLS
// (socketCredentials). In a single process, calls are direct (InProcess).
//
// It authorizes callers by certificate, finds replicas (Addresses, XDS), balances, retries and hedges calls, and
// drains servers. It does not contain a service's logic. It depends on contracts in three places.
//
//   - status.go: a Kubernetes API error crosses a call unchanged, as a metav1.Status in the details of the gRPC
//     status.
//   - codec.go and held.go: the messages of the watch tier and of the event log are sent without a copy of their
//     bytes.
//   - methods.go: the names of methods, with their clients and their retry and drain behavior.
//
// gRPC owns the goroutines of connections and servers. XDS.Run blocks its caller's goroutine and has a goroutine that
// receives. InProcess runs the handler of each stream in a goroutine. Hedged calls its function first on the caller's
// goroutine, then on timer goroutines. A callback of WithReassignment runs in its own goroutine.
//
// # Review notes
//
// Check:
//   - A new method has its clients in AllowedClients and in docs/operators/security.md, and a row in
//     docs/contributors/rpc-failures.md. Tests compare them.
//   - A method that must not run twice is in NonIdempotent. All other methods may be retried, and some are hedged.
//   - A long stream is in EndOnDrain if another replica can continue it without loss.
//
// Never:
//   - Change a message after it was sent. Calls in one process share it, and the codec refers to its bytes.
//   - Apply an empty endpoint list. A faulty xDS server would otherwise stop all calls.
//   - Pass context values to a service in the same process, except the values that a wire carries. Admission once wrote
//     into the gateway's audit context, and validated every pod twice.
//   - Count streams as outstanding calls. A stream that waited for its own caller once made a registry look frozen.
//
// Why not the obvious alternative:
//   - gRPC's round_robin and least_request: a frozen process keeps its connections until keepalive ends them. GETs
//     then took 13.0 s; with this balancer and Hedged they take 1.1 s.
//   - gRPC's own xDS client: each call costs more (docs/contributors/dependencies.md).
//   - TLS records on Unix sockets: encryption was a third of the cost of a list between two processes.
//   - Sockets without TLS: the certificates are the callers' identities, and the handshake detects a relay.
package rpc
