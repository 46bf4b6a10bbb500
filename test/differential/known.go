package main

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

// difference is an accepted difference with its reason. docs/operators/compatibility.md lists the same differences.
// Its patterns match no other request and no other difference. A complete run contains each difference.
type difference struct {
	name, reason string
	// request matches "METHOD path (about)"; detail matches the difference's text.
	request, detail *regexp.Regexp
	// when limits the difference further. It may be nil.
	when func(r *request, a, b answer) bool
	// absence states why a complete run may lack the difference: it depends on the seed, or on a race in a server.
	absence string
}

// explained returns the accepted difference that matches, or nil.
func (p *report) explained(r *request, a, b answer, detail string) *difference {
	sent := r.String() + " (" + r.about + ")"
	for _, d := range p.known {
		if d.request.MatchString(sent) && d.detail.MatchString(detail) && (d.when == nil || d.when(r, a, b)) {
			return d
		}
	}
	return nil
}

// missing returns the names of the accepted differences that the run lacks without a reason.
func (p *report) missing() (names []string) {
	for _, d := range p.known {
		if p.listed[d] == 0 && d.absence == "" {
			names = append(names, d.name)
		}
	}
	return names
}

func is(pattern string) *regexp.Regexp { return regexp.MustCompile(pattern) }

const (
	// flowControlHeader matches a header of flow control that a single server sends.
	flowControlHeader = `^header X-Kubernetes-Pf-(Flowschema|Prioritylevel)-Uid: `
	// audited matches the position of an object in an audit record.
	audited = `(\[\d+\]\.(requestObject|responseObject|responseStatus))?`
)

// knownByConfiguration are the accepted differences under flags other than the default.
var knownByConfiguration = []*difference{
	{
		name:    "a name of the services in a client's certificate",
		request: is(`certificate (and token: )?the services' own name\)$`),
		detail:  is(`^code: (20[01]|403 .*) \| 401 Unauthorized$`),
		reason: "With --services-client-ca-file, only that authority gives the names of the system's services. " +
			"Such a name has rights that no policy can remove.",
	},
	{
		name:    "the services' own users",
		request: is(`\((root|alice|bob|carol|) ?impersonates map\[.*Impersonate-User:\[system:watershed:authz\]\]\)$`),
		detail: is(flowControlHeader + `"[^"]+" \| ""$|` +
			`^code: 403 .* \| 200$|` +
			`(^code: 20[01] \||^\.message: .* \|) .*not among the rights of this service of the system"?$`),
		reason: "A user that may impersonate every user may also impersonate an internal service. No policy grants " +
			"the rights of internal services, and flow control does not limit them.",
	},
	{
		name:    "ABAC's readonly and constrained impersonation",
		request: is(`^GET /api(/v1/namespaces/default/(pods|pods/here|configmaps/one))? \(\w+ impersonates map\[`),
		detail: is(`(^code: 200 \| 403|^\.message: .* \|) .*cannot impersonate-on:|^\.details\.(group|kind|name): |` +
			flowControlHeader),
		when: func(_ *request, _, b answer) bool {
			return b.code == 403 && strings.Contains(string(b.body), "cannot impersonate-on:")
		},
		reason: "kube-apiserver treats impersonate-on:…:get as a read, so ABAC's readonly lines allow it to " +
			"readers. Watershed treats it as the impersonation verb.",
	},
	{
		name:    "metrics are a page each",
		request: is(`^GET /metrics \(`),
		detail:  is(`^: "# HELP .* \| "# HELP `),
		reason:  "The values of metrics differ between any two servers.",
	},
}

// knownOfAudit are the accepted differences in records of audit logs.
var knownOfAudit = []*difference{
	{
		name:    "a patch that is no JSON",
		request: is(`^PATCH \S+\?fieldManager=\w+(&\S+)? \((apply|walk)`),
		detail:  is(`^code: 0 \| \d+`),
		when: func(r *request, a, b answer) bool {
			return !json.Valid(r.body) && !strings.Contains(string(a.body), "ResponseComplete") &&
				strings.Contains(string(b.body), "ResponseComplete")
		},
		reason: "kube-apiserver cannot encode an event with YAML or a truncated object, and drops it with its batch. " +
			"Watershed writes YAML as JSON, and other bodies as a string.",
	},
	{
		name:    "a Table without managedFields",
		request: is(`^GET /apis/flowcontrol\.apiserver\.k8s\.io/v1/prioritylevelconfigurations \(list\)$`),
		detail:  is(`^error: Get "[^"]+": .*EOF \| <nil>$|^code: 500 .* \| 200$`),
		when: func(_ *request, a, _ answer) bool {
			return a.err != nil || strings.Contains(string(a.body), `"stage":"Panic"`)
		},
		reason: "kube-apiserver panics if omitManagedFields applies to a Table whose rows have no object.",
	},
}

// repairEvent matches an Event of the repair controllers that create Events of Services
// (pkg/registry/core/service/ipallocator and portallocator). In a list of metadata it only has its name.
var repairEvent = is(`"(ip|port)allocator-repair-controller"|"name":"svc\.[0-9a-f]{16}"`)

// race is the absence of a difference that needs a race between the test and a controller.
const race = "It needs a race between the test and a controller of kube-apiserver."

// dangling matches the places of the condition Dangling and of the managedFields of its controller.
var dangling = is(`^` + audited + `(\.(items|rows)\[\d+\](\.object)?)?(\.status|\.metadata\.managedFields)\b|` +
	`^` + audited + `\.rows\[\d+\]\.cells\[5\]: `)

// withoutDangling returns FlowSchemas without the condition Dangling and the managedFields of its controller. A Table
// shows ? without the condition.
func withoutDangling(v any) any {
	if list, ok := v.([]any); ok {
		for i := range list {
			list[i] = withoutDangling(list[i])
		}
	}
	m, ok := v.(map[string]any)
	if !ok {
		return v
	}
	for key, field := range m {
		list, ok := field.([]any)
		switch {
		case ok && key == "conditions":
			m[key] = slices.DeleteFunc(list, func(e any) bool {
				condition, _ := e.(map[string]any)
				return condition["type"] == "Dangling"
			})
		case ok && key == "managedFields":
			m[key] = slices.DeleteFunc(list, func(e any) bool {
				return strings.HasPrefix(manager(e), "api-priority-and-fairness-config-consumer-v1 ")
			})
		case ok && key == "cells" && len(list) > 5 && (list[5] == "True" || list[5] == "False"):
			list[5] = "?"
		default:
			m[key] = withoutDangling(field)
		}
		if list, ok := m[key].([]any); ok && len(list) == 0 {
			delete(m, key)
		}
	}
	return m
}

var known = []*difference{
	{
		name:    "flow control's condition",
		request: is(`/apis/flowcontrol\.apiserver\.k8s\.io/v1/flowschemas`),
		detail: is(dangling.String() + `|^` + audited +
			`\.(message|details\.causes\[\d+\]\.message): .*Invalid value: .*FlowSchema`),
		when: func(_ *request, a, b answer) bool {
			rest := differences("", normal(withoutDangling(decode(a))), normal(withoutDangling(decode(b))))
			return !slices.ContainsFunc(rest, dangling.MatchString)
		},
		reason: "A controller writes a condition to each FlowSchema, at most six times a minute. After an update has " +
			"removed the condition, it may be present on one side only.",
		absence: race,
	},
	{
		name:    "flow control's condition, meanwhile",
		request: is(`^(PUT|PATCH) /apis/flowcontrol\.apiserver\.k8s\.io/v1/flowschemas/`),
		detail:  is(`^code: (409 .* \| (200|422)\b|(200|422)\b.* \| 409 )`),
		when:    func(r *request, _, _ answer) bool { return strings.Contains(string(r.body), "{{version") },
		reason:  "The same controller may write the FlowSchema between the read of its revision and the write with it.",
		absence: race,
	},
	{
		name:    "an Event of a repair",
		request: is(`^GET \S+/events(\?\S*)? \(`),
		detail:  is(`^` + audited + `(\.(items|rows)(\[\d+\]|: \d+ of )|\.metadata\.remainingItemCount: )`),
		when: func(_ *request, a, b answer) bool {
			return repairEvent.Match(a.body) != repairEvent.Match(b.body)
		},
		reason: "The repair controllers of cluster IPs and node ports are the same in both servers. They may see a " +
			"Service before its allocation, and then create an Event.",
		absence: race,
	},
	{
		name:    "an Event of a repair, beyond the page",
		request: is(`^GET \S+/events\?\S*limit=\d`),
		detail:  is(`^` + audited + `\.metadata\.remainingItemCount: `),
		reason:  "As above: the Event counts in remainingItemCount although the page does not show it.",
		absence: race,
	},
	{
		name:    "429 of a cache that begins",
		request: is(`^(GET|DELETE) /apis/diff\.example\.com/`),
		detail:  is(`^code: 429 .* \| 200$`),
		reason:  "kube-apiserver briefly rejects lists of a custom resource after its CRD has changed.",
		absence: race,
	},
	{
		name:    "order of a validation's errors",
		request: is(`^(POST|PUT) /apis/autoscaling/v\d/namespaces/\w+/horizontalpodautoscalers\b`),
		detail:  is(`^\.details\.causes\[\d+\]\.(field|message): "spec\.metrics\[|^\.message: .* spec\.metrics\[\d\]`),
		when: func(_ *request, a, b answer) bool {
			return a.code == 422 && b.code == 422 && len(a.body) == len(b.body)
		},
		reason:  "The validation of metrics iterates over a map in random order.",
		absence: "Both servers may iterate in the same order.",
	},
	{
		name:    "internalTrafficPolicy of ExternalName services, watched",
		request: is(`^WATCH /api/v1/namespaces/\w+/services\?`),
		detail:  is(`^\[\d+\]\.object\.spec\.internalTrafficPolicy: "Cluster" \| nothing$`),
		when: func(_ *request, _, b answer) bool { // ours lacks it only there
			for event := range bytes.Lines(b.body) {
				if !bytes.Contains(event, []byte(`"internalTrafficPolicy"`)) &&
					!bytes.Contains(event, []byte(`"type":"ExternalName"`)) {
					return false
				}
			}
			return true
		},
		reason: "The field must be dropped on reads. kube-apiserver's watches show it until a list drops it from the " +
			"shared object. Watershed always drops it.",
	},
	{
		name:    "an empty namespace",
		request: is(`^(POST|DELETE) /api/v1/namespaces//pods \(`),
		detail:  is(`^code: (400 Namespace parameter required\.|403 .*) \| 405 the server does not allow this method`),
		reason: "kube-apiserver's web framework routes the path as a namespaced path with an empty namespace, and " +
			"rejects it later. Watershed has no such path.",
	},
	{
		name:    "a connection without a name",
		request: is(`^(GET|POST|DELETE) \S+/(pods|nodes)//(proxy/|exec)\?fieldSelector=`),
		detail:  is(`^code: (400|405|500) .* \| 404 the server could not find the requested resource$`),
		reason: "kube-apiserver authorizes it as a list, takes the name from the field selector, and connects. " +
			"Watershed rejects it.",
	},
	{
		name:    "an empty map that admission has seen",
		request: is(`^(POST|PUT|PATCH) /api/v1/persistentvolumes\b`),
		detail: is(`^` + audited + `\.(message|details\.causes\[\d+\]\.message): ` +
			`.*Unsupported value: {}.* \| .*Unsupported value: null`),
		reason: "Admission passes objects in protobuf, which does not distinguish an empty map from none. The error " +
			"shows null for {}.",
	},
	{
		name:    "some empty Tables",
		request: is(`^GET \S+/(limitranges|(cluster)?roles|csistoragecapacities|customresourcedefinitions)(\?\S*)? \(`),
		detail:  is(`^` + audited + `\.rows: null \| \[\]$`),
		reason:  "kube-apiserver returns null as the rows of some empty Tables. Watershed returns an empty list.",
	},
	{
		name:    "the index",
		request: is(`^GET / \(`),
		detail: is(`^\.paths\./(healthz|readyz)/(admission|authn|authz|discovery|fairness|kms-providers|watch-tier): ` +
			`nothing \| true$`),
		reason: "Watershed has a health check for each service.",
	},
}
