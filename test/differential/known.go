package main

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

// difference is one that is known, with the reason for it; docs/compatibility.md lists the same.
type difference struct {
	name, reason string
	// request and what are patterns: of "METHOD path" and of the difference as it is written.
	request, detail *regexp.Regexp
	// when narrows it further; nil: always.
	when func(r *request, a, b answer) bool
}

// explained is the known difference that what is, or nil.
func (p *report) explained(r *request, a, b answer, detail string) *difference {
	for _, d := range p.known {
		if d.request.MatchString(r.String()) && d.detail.MatchString(detail) && (d.when == nil || d.when(r, a, b)) {
			return d
		}
	}
	return nil
}

func is(pattern string) *regexp.Regexp { return regexp.MustCompile(pattern) }

// knownByConfiguration are those under flags other than the default.
var knownByConfiguration = []*difference{
	{
		name:    "the services' own users",
		request: is(`.`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return strings.Contains(r.about, "system:watershed:authz") && (a.code == 403 && b.code == 200 ||
				b.header.Get("X-Kubernetes-Pf-Flowschema-Uid") == "" || // flow control does not bound them
				strings.Contains(string(b.body), "not among the rights of this service of the system"))
		},
		reason: "Who may be anybody may be one of the system's services too, whose rights no policy tells.",
	},
	{
		name:    "anonymous users where everything is allowed",
		request: is(`.`),
		detail:  is(`.`),
		when: func(_ *request, _, b answer) bool {
			return strings.Contains(string(b.body), "anonymous requests are not allowed where everything is")
		},
		reason: "authz refuses them also where they are impersonated or asked about: it does not know what authn " +
			"lets in.",
	},
	{
		name:    "ABAC's readonly and constrained impersonation",
		request: is(`^GET`),
		detail:  is(`.`),
		when: func(r *request, _, b answer) bool {
			return strings.Contains(r.about, "impersonates") && b.code == 403 &&
				strings.Contains(string(b.body), "cannot impersonate-on:")
		},
		reason: "kube-apiserver takes impersonate-on:…:get for a reading, which ABAC's readonly lines then allow to " +
			"whom they allow the reading; here the verb is what it says.",
	},
	{
		name:    "metrics are a page each",
		request: is(`^GET /metrics$`),
		detail:  is(`^: `),
		reason:  "What is counted differs between any two servers.",
	},
}

// knownOfAudit are those in the records of audit logs.
var knownOfAudit = []*difference{
	{
		name:    "a patch that is no JSON",
		request: is(`^PATCH`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return !json.Valid(r.body) && !strings.Contains(string(a.body), "ResponseComplete") &&
				strings.Contains(string(b.body), "ResponseComplete")
		},
		reason: "kube-apiserver cannot write an event that holds YAML or half an object, and drops it with its batch; " +
			"here YAML is written as JSON, and anything else as a string.",
	},
	{
		name:    "a Table without managedFields",
		request: is(`^GET`),
		detail:  is(`.`),
		when: func(_ *request, a, b answer) bool {
			return (a.err != nil || strings.Contains(string(a.body), `"stage":"Panic"`)) && b.code == 200
		},
		reason: "kube-apiserver panics where omitManagedFields is to be heeded in a Table whose rows have no object.",
	},
}

// repairs are the controllers of a server's own that leave Events of Services (pkg/registry/core/service/ipallocator
// and portallocator).
var repairs = []string{"ipallocator-repair-controller", "portallocator-repair-controller"}

var known = []*difference{
	{
		name:    "flow control's condition",
		request: is(`flowschemas`),
		detail:  is(`status|managedFields|rows\[\d+\]\.cells\[5\]|Dangling|Invalid value: `),
		reason: "A controller says of each FlowSchema whether its level exists, in its own time, and writes it six " +
			"times a minute at most: what it says after an update has taken it away may be there on one side alone.",
	},
	{
		name:    "flow control's condition, meanwhile",
		request: is(`^(PUT|PATCH) .*/flowschemas`),
		detail:  is(`.`),
		when: func(r *request, a, b answer) bool {
			return (a.code == 409) != (b.code == 409) && strings.Contains(string(r.body), "{{version")
		},
		reason: "The same controller may write it between the reading of the revision and the write that names it.",
	},
	{
		name:    "an Event of a repair",
		request: is(`^(GET|WATCH) .*/events`),
		detail:  is(`\.(items|rows)\b|remainingItemCount|^watch`),
		when: func(_ *request, a, b answer) bool {
			return slices.ContainsFunc(repairs, func(name string) bool {
				return strings.Contains(string(a.body), name) != strings.Contains(string(b.body), name)
			})
		},
		reason: "The controllers that repair cluster IPs and node ports, the same in both, may see a Service before " +
			"its allocation, and then leave an Event.",
	},
	{
		name:    "an Event of a repair, beyond the page",
		request: is(`^GET .*/events\?.*limit=`),
		detail:  is(`remainingItemCount`),
		reason:  "As above: such an Event counts where it is not shown.",
	},
	{
		name:    "429 of a cache that begins",
		request: is(`diff\.example\.com`),
		detail:  is(`.`),
		when:    func(_ *request, a, b answer) bool { return a.code == 429 && b.code == 200 },
		reason:  "kube-apiserver refuses lists of a custom resource for a moment after its definition has changed.",
	},
	{name: "order of a validation's errors", request: is(`horizontalpodautoscalers`), detail: is(`causes|message`),
		when: func(_ *request, a, b answer) bool {
			return a.code == 422 && b.code == 422 && len(a.body) == len(b.body)
		},
		reason: "The validation of metrics goes through a map, in another order each time."},
	{
		name:    "internalTrafficPolicy of ExternalName services, watched",
		request: is(`^WATCH .*/services`),
		detail:  is(`internalTrafficPolicy`),
		reason: "The field is to be dropped when it is read. kube-apiserver's watches show it until a list has " +
			"dropped it from the object that they share; here it is dropped always.",
	},
	{name: "an empty namespace", request: is(`^(POST|DELETE) /api/v1/namespaces//`), detail: is(`.`),
		reason: "kube-apiserver's web framework takes the path for one with a namespace that has no name; either " +
			"refuses it."},
	{
		name:    "a connection without a name",
		request: is(`/(pods|nodes)//(proxy|exec)`),
		detail:  is(`.`),
		when:    func(_ *request, _, b answer) bool { return b.code == 404 },
		reason: "kube-apiserver authorizes it as a list, takes the name from the field selector, and connects; here " +
			"it is refused.",
	},
	{
		name:    "an empty map that admission has seen",
		request: is(`/persistentvolumes`),
		detail:  is(`Unsupported value`),
		when:    func(_ *request, a, b answer) bool { return a.code == 422 && b.code == 422 },
		reason: "Admission hands objects over in protobuf, in which an empty map is none; the refusal shows null " +
			"for {}.",
	},
	{
		name:    "some empty Tables",
		request: is(`^GET`),
		detail:  is(`^\.rows: null \| \[\]$`),
		reason:  "kube-apiserver says null of some empty Tables' rows; here they are always a list.",
	},
	{name: "pages of OpenAPI v3", request: is(`GET /openapi/v3$`), detail: is(`.`),
		reason: "kube-apiserver has documents of its discovery pages too, and hashes of its own making."},
	{
		name:    "the index",
		request: is(`GET /$`),
		detail:  is(`\.paths`),
		reason:  "kube-apiserver names a health check for each of its start hooks.",
	},
	{name: "metadata of DaemonSets", request: is(`daemonsets`), detail: is(`deprecated.daemonset.template.generation`),
		reason: "Metadata is cut from the object as it is served; an annotation that the conversion to apps/v1 adds " +
			"is part of that."},
}
