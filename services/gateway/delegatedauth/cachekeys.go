package delegatedauth

import (
	"maps"
	"slices"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// cacheKeys are the keys under which a decision may be cached: for every namespace, for every name in the namespace, or
// for this request. A non-resource request has only the key exact.
type cacheKeys struct {
	wildcardNamespace, wildcardName, exact digest
	isResource                             bool
}

// newCacheKeys returns the keys, which cover everything that a decision may depend on. ok is false if the decision is
// not cacheable: a selector does not parse, or the input is too long.
func newCacheKeys(a authorizer.Attributes) (k cacheKeys, ok bool) {
	d := newDigester()
	writeUser(d, a.GetUser())
	d.part(a.GetVerb())
	if !a.IsResourceRequest() {
		d.part("path")
		d.part(a.GetPath())
		k.exact, ok = d.sum()
		return k, ok
	}
	k.isResource = true
	for _, s := range []string{"resource", a.GetAPIGroup(), a.GetAPIVersion(), a.GetResource(), a.GetSubresource()} {
		d.part(s)
	}
	fields, err := a.GetFieldSelector()
	if err != nil {
		return cacheKeys{}, false
	}
	d.number(len(fields))
	for _, f := range fields {
		d.part(f.Field)
		d.part(string(f.Operator))
		d.part(f.Value)
	}
	labels, err := a.GetLabelSelector()
	if err != nil {
		return cacheKeys{}, false
	}
	d.number(len(labels))
	for _, l := range labels {
		d.part(l.String())
	}
	k.wildcardNamespace = d.sumSoFar()
	d.part(a.GetNamespace())
	k.wildcardName = d.sumSoFar()
	d.part(a.GetName())
	k.exact, ok = d.sum()
	return k, ok
}

func writeUser(d *digester, u user.Info) {
	if u == nil {
		d.part("nobody")
		return
	}
	d.part(u.GetName())
	d.part(u.GetUID())
	d.number(len(u.GetGroups()))
	for _, g := range u.GetGroups() {
		d.part(g)
	}
	d.number(len(u.GetExtra()))
	for _, k := range slices.Sorted(maps.Keys(u.GetExtra())) {
		d.part(k)
		d.number(len(u.GetExtra()[k]))
		for _, v := range u.GetExtra()[k] {
			d.part(v)
		}
	}
}
