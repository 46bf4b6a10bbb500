// Package authn authenticates requests with upstream's own authenticators: client certificates, bearer tokens (service
// accounts, bootstrap, static, OIDC, webhook), front proxies' headers, and anonymous. It does not authorize.
//
// Only the gateway calls it. Each response has a cache TTL: the minimum of --authentication-cache-ttl, the token's exp,
// and the certificate's end. Anonymous responses have none. The response also has the headers that the gateway must
// replace before it forwards the request, because credentials are never forwarded.
//
// authn reads service accounts, their secrets, bootstrap tokens, and the pods and nodes that tokens are bound to. It
// reads them as a client of the gateway, with an identity of its own. While that data is not fresh, authn rejects users
// that depend on it with UNAVAILABLE. Certificates and static tokens still authenticate.
//
// Goroutines: Run starts the certificate reloaders, the file watcher and the informers, and ends them with its context.
// Each request runs in its gRPC handler's goroutine.
//
// # Review notes
//
// Check in every change:
//   - Order. The authenticators run in kube-apiserver's order, and errors combine as in its union.
//     kubeauthenticator.Config.New is the reference.
//   - Headers. removeCredentials removes every form of credential, whichever authenticator accepted the request.
//   - Cache TTL. A response never outlives its credential. A response for a JWT or a bootstrap token lives at most 1 s,
//     because an object that the token depends on may be deleted.
//   - Reloads. An invalid new file leaves the old configuration in force, and each reload empties the token cache.
//
// Never:
//   - Accept an identity other than authn, authz, admission and registry from the services' authority.
//   - Report a password as wrong without comparing it: a full bcrypt queue is errBusy, which becomes 503.
//   - Cache all pods or nodes. A bound token's pod or node is read on demand.
//   - Skip the comparison for an unknown user. The response time would reveal which users exist.
//
// Why the obvious alternatives fail:
//   - One upstream authenticator for everything: a reload of one file would rebuild all, and metrics could not name the
//     authenticator.
//   - Upstream's token cache without tokenLookups: it detaches a lookup from its callers for 30 s, so a hanging webhook
//     serves clients that are gone.
package authn
