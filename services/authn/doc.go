// Package authn says who a request is of, by upstream's own authenticators: client certificates, bearer tokens of
// service accounts, bootstrap tokens, static tokens, OIDC and webhooks, front proxies' headers, and anonymous.
//
// It is called by the gateway alone. Each answer says for how long it may be kept (the least of
// --authentication-cache-ttl, the token's exp and the certificate's end; nothing for strangers), and what the request's
// headers are to be before it travels on: a credential never does.
//
// What it must look up of the cluster (service accounts, their secrets, bootstrap tokens, pods and nodes that tokens
// are bound to) it reads as a client of the gateway, with an identity of its own. While it does not know that this is
// fresh, users that only the cluster can vouch for are not authenticated; certificates and static tokens are.
package authn
