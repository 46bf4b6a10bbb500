// Package admission runs the admission chain: upstream's own plugins, webhooks and CEL policies, in kube-apiserver's
// order.
//
// It is called by the gateway alone, on registry's behalf: Admit may change an object, Validate may refuse it.
// Interests streams which operations on which resources anything in the chain looks at; the gateway has registry ask
// for those alone, and for everything until it has been told.
//
// What plugins must know of the cluster they read as clients of the gateway, with an identity of the service's own.
// While the service does not know that webhooks and policies are fresh, writes that they might refuse are refused with
// 503.
package admission
