package main

import (
	"context"
	"fmt"
	"strings"
)

const (
	authorization  = "/apis/authorization.k8s.io/v1/"
	authentication = "/apis/authentication.k8s.io/v1/"
)

// reviewing returns a shape that sends n reviews of a kind.
func reviewing(name, about string, as sender, n int, path string, spec func(i int) object) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		kind := map[string]string{"selfsubjectaccessreviews": "SelfSubjectAccessReview",
			"subjectaccessreviews": "SubjectAccessReview", "selfsubjectrulesreviews": "SelfSubjectRulesReview",
			"tokenreviews": "TokenReview"}[path[strings.LastIndexByte(path, '/')+1:]]
		group, _, _ := strings.Cut(strings.TrimPrefix(path, "/apis/"), "/")
		times(ctx, n, 8, func(i int) {
			a.create(ctx, as, path, object{"apiVersion": group + "/v1", "kind": kind, "spec": spec(i)})
		})
	}}
}

func reviews() []*shape {
	attributes := func(i int) object {
		return object{"namespace": fmt.Sprintf("n%d", i), "verb": "get", "resource": "pods"}
	}
	return []*shape{
		reviewing("500 SubjectAccessReviews", "", admin, 500, authorization+"subjectaccessreviews", func(i int) object {
			return object{"user": fmt.Sprintf("u%d", i), "resourceAttributes": attributes(i)}
		}),
		reviewing("10 SubjectAccessReviews of 10,000 groups", "", admin, 10, authorization+"subjectaccessreviews",
			func(i int) object {
				return object{"user": "u", "groups": many(10_000, func(i int) string { return fmt.Sprintf("g%d", i) }),
					"resourceAttributes": attributes(i)}
			}),
		reviewing("10 SubjectAccessReviews with names of 2 MB", "", admin, 10, authorization+"subjectaccessreviews",
			func(i int) object {
				o := attributes(i)
				o["name"] = fmt.Sprintf("%s%d", strings.Repeat("x", 2_000_000), i)
				return object{"user": "u", "resourceAttributes": o}
			}),
		reviewing("500 SelfSubjectRulesReviews of a tenant", "", tenant, 500, authorization+"selfsubjectrulesreviews",
			func(i int) object { return object{"namespace": fmt.Sprintf("n%d", i)} }),
		reviewing("500 TokenReviews of unknown tokens", "", admin, 500, authentication+"tokenreviews",
			func(i int) object { return object{"token": fmt.Sprintf("unknown-%d", i)} }),
		reviewing("20 TokenReviews of 2 MB", "", admin, 20, authentication+"tokenreviews",
			func(i int) object { return object{"token": fmt.Sprintf("%s%d", strings.Repeat("x", 2_000_000), i)} }),
		{
			name:  "200 tokens requested",
			about: "TokenRequests of the tenant, each with 100 audiences",
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 200, 4, func(int) {
					a.create(ctx, tenant, "/api/v1/namespaces/"+namespace+"/serviceaccounts/tenant/token", object{
						"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": object{
							"audiences": many(
								100,
								func(i int) string { return fmt.Sprintf("a%d", i) },
							), "expirationSeconds": 600}})
				})
			},
		},
	}
}
