package main

import (
	"crypto"
	"crypto/elliptic"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// accountIssuer is who issues the tokens of service accounts (harness.Twins).
const accountIssuer = "https://kubernetes.default.svc.cluster.local"

// credentials are what a configuration knows and what it does not, by name.
type credentials struct {
	tokens       map[string]func(*side) string
	certificates []*certificate
}

// authenticators sends every kind of credential, good and bad in each of its ways, to servers with every authenticator
// on: once with OpenID Connect by flags, once by AuthenticationConfiguration.
func (a *axis) authenticators() {
	a.configuration("authenticators by flags", func(dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w),
			"--oidc-issuer-url="+w.base+"/flags", "--oidc-client-id=kubernetes",
			"--oidc-ca-file="+w.ca.file(filepath.Join(dir, "oidc-ca.crt")),
			"--oidc-username-claim=email", "--oidc-groups-claim=groups", "--oidc-groups-prefix=oidc:",
			"--oidc-required-claim=team=a", "--oidc-signing-algs=RS256,ES256")
	}, func(p *pair, w *web, _ string) { a.everyCredential(p, w.base+"/flags", "kubernetes") })
	a.configuration("authenticators by configuration", func(dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w), "--authentication-config="+a.structured(dir, w))
	}, func(p *pair, w *web, _ string) {
		a.everyCredential(p, w.base+"/flags", "kubernetes")
		a.structuredTokens(p, w)
	})
	a.configuration("nobody without a credential", func(dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w), "--anonymous-auth=false", "--api-audiences=api,other")
	}, func(p *pair, w *web, _ string) { a.everyCredential(p, w.base+"/nobody", "x") })
}

// everyAuthenticator writes the files that the authenticators read, and answers the flags that name them.
func (a *axis) everyAuthenticator(dir string, w *web) []string {
	rsaKey := newRSA(a.t)
	a.keys = map[string]any{"rsa": rsaKey, "ec": newKey(a.t, elliptic.P256()), "ec384": newKey(a.t, elliptic.P384())}
	for _, path := range []string{"/flags", "/second", "/third"} {
		w.issuer(path, a.keys)
	}
	w.reviewer("/review")
	a.hook(dir, "token-webhook", w, "/review")
	write(a.t, filepath.Join(dir, "tokens.csv"), `filed-alice,alice,1,"readers,system:masters-not"
filed-bob,bob,2
filed-comma,"car,ol",3,"a,b c"
filed-system,system:anonymous,4
filed-node,system:node:n1,5,system:nodes
filed-sa,system:serviceaccount:default:default,6,system:serviceaccounts
filed-empty-groups,dora,7,
filed-ünï,ünï,8
`)
	return []string{
		"--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
		"--authentication-token-webhook-config-file=" + filepath.Join(dir, "token-webhook"),
		"--authentication-token-webhook-version=v1",
		"--enable-bootstrap-token-auth=true",
		"--requestheader-uid-headers=X-Remote-Uid",
	}
}

// structured writes an AuthenticationConfiguration of several issuers.
func (a *axis) structured(dir string, w *web) string {
	ca, _ := json.Marshal(string(w.ca.pem()))
	path := filepath.Join(dir, "authentication.yaml")
	write(a.t, path, fmt.Sprintf(`apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions: [{path: /livez}, {path: /readyz}, {path: /version}]
jwt:
- issuer: {url: %[1]s/flags, certificateAuthority: %[2]s, audiences: [kubernetes]}
  claimMappings:
    username: {claim: email, prefix: ""}
    groups: {claim: groups, prefix: "oidc:"}
  claimValidationRules: [{claim: team, requiredValue: a}]
- issuer:
    url: %[1]s/second
    discoveryURL: %[1]s/third/.well-known/openid-configuration
    certificateAuthority: %[2]s
    audiences: [one, two]
    audienceMatchPolicy: MatchAny
  claimMappings:
    username: {expression: "claims.sub + '@second'"}
    groups: {expression: "has(claims.roles) ? dyn(claims.roles) : dyn([])"}
    uid: {expression: "claims.jti"}
    extra:
    - {key: example.com/tenant, valueExpression: "claims.tenant"}
    - {key: example.com/nested, valueExpression: "has(claims.deep) ? string(claims.deep.level) : ''"}
  claimValidationRules:
  - {expression: "claims.exp - claims.iat <= 86400", message: "a day at most"}
  - {expression: "!has(claims.email) || claims.email_verified == true", message: "unverified"}
  userValidationRules:
  - {expression: "!user.username.startsWith('system:')", message: "no system names"}
  - {expression: "user.groups.all(g, !g.startsWith('system:'))", message: "no system groups"}
- issuer: {url: %[1]s/third, certificateAuthority: %[2]s, audiences: [third]}
  claimMappings:
    username: {claim: sub, prefix: "third-"}
`, w.base, ca))
	return path
}

// everyCredential sends all of them.
func (a *axis) everyCredential(p *pair, issuer, audience string) {
	c := &credentials{tokens: map[string]func(*side) string{}}
	a.opaque(c)
	a.accounts(p, c)
	for name, j := range a.openID(issuer, audience) {
		c.tokens["openid "+name] = func(*side) string { return j.String() }
	}
	a.certificates(p, c)
	a.waitForIssuer(p, issuer, audience)
	for _, name := range slices.Sorted(maps.Keys(c.tokens)) {
		a.tokenForms(p, name, c.tokens[name])
	}
	for _, cert := range c.certificates {
		for _, r := range plain() {
			r.as, r.about = cert, "certificate "+cert.name
			p.askLater(r)
		}
		r := plain()[0] // with a token beside it
		r.as, r.about = cert, "certificate and token: "+cert.name
		r.header = merged(r.header, map[string]string{"Authorization": "Bearer filed-bob"})
		p.askLater(r)
	}
	a.frontProxy(p)
	a.schemes(p)
	a.issuerDocuments(p)
}

// waitForIssuer waits until the servers have read the issuer's keys: until then its tokens are refused.
func (a *axis) waitForIssuer(p *pair, issuer, audience string) {
	if strings.HasSuffix(issuer, "/nobody") {
		return
	}
	good := a.openID(issuer, audience)["valid"]
	r := plain()[0]
	r.as = nobody
	r.more = func(*side) http.Header { return http.Header{"Authorization": {"Bearer " + good.String()}} }
	for _, s := range []*side{p.theirs, p.ours} {
		harness.Eventually(a.t, time.Minute, func() error {
			if got := s.do(a.t.Context(), r); got.code != http.StatusCreated {
				return fmt.Errorf("%s knows no token of %s: %d %s", s.name, issuer, got.code, got.body)
			}
			return nil
		})
	}
}

var nobody = &certificate{name: "none"}

// plain are requests that tell who somebody is, what they may do, and whether they are let in at all.
func plain() []*request {
	return []*request{
		{
			method: http.MethodPost, path: "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			header: map[string]string{"Content-Type": "application/json"},
			body:   []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`),
		},
		{method: http.MethodGet, path: "/api/v1/namespaces/default"},
		{method: http.MethodGet, path: "/version"},
	}
}

// tokenForms sends a token in each way that one comes.
func (a *axis) tokenForms(p *pair, name string, value func(*side) string) {
	for _, r := range plain() {
		r.as, r.about = nobody, "bearer: "+name
		r.more = func(s *side) http.Header { return http.Header{"Authorization": {"Bearer " + value(s)}} }
		p.askLater(r)
	}
	r := plain()[1]
	r.as, r.about = nobody, "subprotocol: "+name
	r.more = func(s *side) http.Header {
		return http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"},
			"Sec-Websocket-Protocol": {
				"base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString(
					[]byte(value(s)),
				) + ", v4.channel.k8s.io",
			},
		}
	}
	p.askLater(r)
	for _, audiences := range []string{`[]`, `["` + accountIssuer + `"]`, `["elsewhere"]`, `["elsewhere","api"]`} {
		p.askLater(a.review(name, value, audiences))
	}
}

// review asks the administrator's way who a token is.
func (a *axis) review(name string, value func(*side) string, audiences string) *request {
	r := &request{
		method: http.MethodPost, path: "/apis/authentication.k8s.io/v1/tokenreviews", about: "review: " + name,
		header: map[string]string{"Content-Type": "application/json"},
	}
	r.bodyOf = func(s *side) []byte {
		text, _ := json.Marshal(value(s))
		return fmt.Appendf(
			nil,
			`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":%s,"audiences":%s}}`,
			text,
			audiences,
		)
	}
	return r
}

// opaque are tokens that are no JWTs.
func (a *axis) opaque(c *credentials) {
	for _, t := range []string{
		"filed-alice", "filed-bob", "filed-comma", "filed-system", "filed-node", "filed-sa", "filed-empty-groups",
		"FILED-ALICE", "filed-alic", "filed-alicee", "filed-ünï", "unknown",
		"hook-valid", "hook-audience", "hook-error", "hook-nobody", "hook-500", "hook-garbage",
		"abcdef.0123456789abcdef", "abcdef.0123456789abcdeX", "expird.0123456789abcdef", "noauth.0123456789abcdef",
		"nogrps.0123456789abcdef", "badgrp.0123456789abcdef", "delete.0123456789abcdef", "abcdef.", ".0123456789abcdef",
		"ABCDEF.0123456789ABCDEF", "a.b.c", "..", "...", "a.b", strings.Repeat("a", 20000), strings.Repeat("a.b.", 3000),
		"with space", "tab\tbed", "quote\"d", "{}", "null", "=", "%00",
	} {
		name := t
		if len(name) > 30 {
			name = fmt.Sprintf("%.10s… of %d", t, len(t))
		}
		c.tokens["opaque "+name] = func(*side) string { return t }
	}
}

// openID are tokens of an issuer, well made and not.
func (a *axis) openID(issuer, audience string) map[string]*token {
	now := time.Now()
	base := fields{
		"iss": issuer, "aud": audience, "sub": "subject", "email": "jane@example.com", "email_verified": true,
		"groups": []string{"dev", "ops"}, "team": "a", "iat": now.Unix(), "exp": now.Add(time.Hour).Unix(),
	}
	all := map[string]*token{}
	add := func(name string, header, change fields, key any, bend func(string) string) {
		j := &token{
			header: fields{"alg": "RS256", "kid": "rsa", "typ": "JWT"},
			claims: maps.Clone(base),
			key:    key,
			bend:   bend,
		}
		if key == nil {
			j.key = a.keys["rsa"]
		}
		for k, v := range header {
			if j.header[k] = v; v == nil {
				delete(j.header, k)
			}
		}
		for k, v := range change {
			if j.claims[k] = v; v == nil {
				delete(j.claims, k)
			}
		}
		all[name] = j
	}
	claims := func(name string, change fields) { add(name, nil, change, nil, nil) }
	add("valid", nil, nil, nil, nil)
	claims("expired", fields{"exp": now.Add(-time.Minute).Unix()})
	claims("long expired", fields{"exp": 1})
	claims("no expiry", fields{"exp": nil})
	claims("expiry is text", fields{"exp": "tomorrow"})
	claims("expiry is a fraction", fields{"exp": float64(now.Add(time.Hour).Unix()) + 0.5})
	claims("expiry is far", fields{"exp": int64(1) << 53})
	claims("expiry is negative", fields{"exp": -1})
	claims("not yet", fields{"nbf": now.Add(time.Hour).Unix()})
	claims("issued later", fields{"iat": now.Add(time.Hour).Unix()})
	claims("wrong audience", fields{"aud": "somebody"})
	claims("many audiences", fields{"aud": []string{"x", audience}})
	claims("no audience", fields{"aud": nil})
	claims("empty audiences", fields{"aud": []string{}})
	claims("odd audience", fields{"aud": fields{"a": 1}})
	claims("audience in another case", fields{"aud": strings.ToUpper(audience)})
	claims("wrong issuer", fields{"iss": issuer + "/"})
	claims("unknown issuer", fields{"iss": "https://issuer.example.com"})
	claims("no issuer", fields{"iss": nil})
	claims("odd issuer", fields{"iss": []string{issuer}})
	claims("accounts' issuer", fields{"iss": accountIssuer})
	claims("legacy accounts' issuer", fields{"iss": "kubernetes/serviceaccount"})
	claims("no mail", fields{"email": nil})
	claims("mail not verified", fields{"email_verified": false})
	claims("mail verified is text", fields{"email_verified": "true"})
	claims("no verification", fields{"email_verified": nil})
	claims("mail is a list", fields{"email": []string{"a"}})
	claims("empty mail", fields{"email": ""})
	claims("system mail", fields{"email": "system:admin"})
	claims("one group", fields{"groups": "only"})
	claims("no groups", fields{"groups": nil})
	claims("groups are numbers", fields{"groups": []int{1}})
	claims("masters", fields{"groups": []string{"system:masters"}})
	claims("empty group", fields{"groups": []string{""}})
	claims("many groups", fields{"groups": strings.Split(strings.Repeat("g,", 500)+"g", ",")})
	claims("wrong team", fields{"team": "b"})
	claims("no team", fields{"team": nil})
	claims("team is a list", fields{"team": []string{"a"}})
	claims("distributed groups", fields{"groups": nil, "_claim_names": fields{"groups": "src"},
		"_claim_sources": fields{"src": fields{"endpoint": "https://127.0.0.1:1/groups"}}})
	add(
		"no algorithm",
		fields{"alg": "none"},
		nil,
		[]byte{},
		func(s string) string { return s[:strings.LastIndex(s, ".")+1] },
	)
	add("no algorithm, in odd case", fields{"alg": "nOnE"}, nil, []byte{}, nil)
	add("algorithm missing", fields{"alg": nil}, nil, nil, nil)
	add("algorithm is a number", fields{"alg": 1}, nil, nil, nil)
	add("HMAC by the public key", fields{"alg": "HS256"}, nil, publicPEM(a.keys["rsa"]), nil)
	add("HMAC by nothing", fields{"alg": "HS256"}, nil, []byte{}, nil)
	add("PS256", fields{"alg": "PS256"}, nil, nil, nil)
	add("RS384", fields{"alg": "RS384"}, nil, nil, nil)
	add("RS512", fields{"alg": "RS512"}, nil, nil, nil)
	add("ES256", fields{"alg": "ES256", "kid": "ec"}, nil, a.keys["ec"], nil)
	add("ES384", fields{"alg": "ES384", "kid": "ec384"}, nil, a.keys["ec384"], nil)
	add("ES256 of another curve", fields{"alg": "ES256", "kid": "ec384"}, nil, a.keys["ec384"], nil)
	add("ES256 by the RSA key's name", fields{"alg": "ES256"}, nil, a.keys["ec"], nil)
	add("RS256 by the EC key's name", fields{"kid": "ec"}, nil, nil, nil)
	add("no key name", fields{"kid": nil}, nil, nil, nil)
	add("unknown key name", fields{"kid": "gone"}, nil, nil, nil)
	add("key name is a path", fields{"kid": "../../../dev/null"}, nil, nil, nil)
	add("key name is a number", fields{"kid": 7}, nil, nil, nil)
	add("another's key", nil, nil, newRSA(a.t), nil)
	add("own key in the header", fields{"jwk": jwk("own", newRSA(a.t))}, nil, newRSA(a.t), nil)
	add("key elsewhere", fields{"jku": "https://127.0.0.1:1/keys"}, nil, nil, nil)
	add("critical", fields{"crit": []string{"b64"}, "b64": false}, nil, nil, nil)
	add("compressed", fields{"zip": "DEF"}, nil, nil, nil)
	add("type is another", fields{"typ": "at+jwt"}, nil, nil, nil)
	add("claims are huge", nil, fields{"x": strings.Repeat("x", 30000)}, nil, nil)
	add(
		"claims are deep",
		nil,
		fields{"x": json.RawMessage(strings.Repeat("[", 200) + strings.Repeat("]", 200))},
		nil,
		nil,
	)
	add("padded", nil, nil, nil, func(s string) string { return s + "=" })
	add("a part more", nil, nil, nil, func(s string) string { return s + ".x" })
	add("a part less", nil, nil, nil, func(s string) string { return s[:strings.LastIndex(s, ".")] })
	add("signature cut", nil, nil, nil, func(s string) string { return s[:len(s)-10] })
	add("signature bent", nil, nil, nil, bent)
	add("claims bent", nil, nil, nil, func(s string) string {
		parts := strings.Split(s, ".")
		return parts[0] + "." + encoded(
			fields{"iss": issuer, "aud": audience, "exp": 1 << 40, "email": "root"},
		) + "." + parts[2]
	})
	add("claims are not JSON", nil, nil, nil, func(s string) string {
		parts := strings.Split(s, ".")
		return parts[0] + "." + encoded([]byte("{")) + "." + parts[2]
	})
	add("standard base64", nil, nil, nil, func(s string) string { return strings.ReplaceAll(s, "-", "+") + "+/" })
	return all
}

// bent is a JWT with another signature of the same length.
func bent(s string) string {
	i := strings.LastIndex(s, ".") + 10
	c := "A"
	if s[i] == 'A' {
		c = "B"
	}
	return s[:i] + c + s[i+1:]
}

func publicPEM(key any) []byte {
	der, err := x509.MarshalPKIXPublicKey(key.(crypto.Signer).Public())
	if err != nil {
		return nil
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
}

// structuredTokens are for the issuers that only a configuration knows.
func (a *axis) structuredTokens(p *pair, w *web) {
	now := time.Now()
	base := fields{"iss": w.base + "/second", "aud": "two", "sub": "zoe", "jti": "42", "tenant": "acme",
		"iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}
	for name, change := range map[string]fields{
		"valid":              nil,
		"roles":              {"roles": []string{"x", "y"}},
		"nested":             {"deep": fields{"level": 3}},
		"roles are text":     {"roles": "x"},
		"no tenant":          {"tenant": nil},
		"tenants":            {"tenant": []string{"a", "b"}},
		"empty tenant":       {"tenant": ""},
		"too long":           {"exp": now.Add(48 * time.Hour).Unix()},
		"unverified":         {"email": "a@b", "email_verified": false},
		"verified":           {"email": "a@b", "email_verified": true},
		"verified missing":   {"email": "a@b"},
		"no uid":             {"jti": nil},
		"uid is a number":    {"jti": 42},
		"system name":        {"sub": "system:x"},
		"no subject":         {"sub": nil},
		"empty subject":      {"sub": ""},
		"subject is odd":     {"sub": 1},
		"other audience":     {"aud": "one"},
		"both audiences":     {"aud": []string{"one", "two"}},
		"third's":            {"aud": "third", "iss": w.base + "/third"},
		"third's, wrong":     {"aud": "one", "iss": w.base + "/third"},
		"third's, no sub":    {"aud": "third", "iss": w.base + "/third", "sub": nil},
		"first's audience":   {"aud": "kubernetes"},
		"claims of deep CEL": {"deep": "not an object"},
	} {
		j := &token{header: fields{"alg": "ES256", "kid": "ec"}, claims: merge(base, change), key: a.keys["ec"]}
		a.tokenForms(p, "second issuer: "+name, func(*side) string { return j.String() })
	}
}

func merge(a, b fields) fields {
	out := maps.Clone(a)
	for k, v := range b {
		if out[k] = v; v == nil {
			delete(out, k)
		}
	}
	return out
}

// accounts makes service accounts and what their tokens are bound to on both sides, and tokens of them.
func (a *axis) accounts(p *pair, c *credentials) {
	key := keyFile(a.t, p.theirs.server.SAKey)
	made := map[*side]map[string]string{}
	for _, s := range []*side{p.theirs, p.ours} {
		made[s] = a.makeAccounts(s)
	}
	id := keyID(a.t, key)
	now := time.Now()
	type change struct {
		header, claims, bound fields
		key                   any
		bend                  func(string) string
	}
	hour := now.Add(time.Hour).Unix()
	for name, ch := range map[string]change{
		"valid":                 {},
		"expired":               {claims: fields{"exp": now.Add(-time.Minute).Unix()}},
		"expired within leeway": {claims: fields{"exp": now.Add(-20 * time.Second).Unix()}},
		"no expiry":             {claims: fields{"exp": nil}},
		"not yet":               {claims: fields{"nbf": now.Add(time.Hour).Unix()}},
		"issued later":          {claims: fields{"iat": now.Add(time.Hour).Unix()}},
		"wrong audience":        {claims: fields{"aud": []string{"elsewhere"}}},
		"audience of the flag":  {claims: fields{"aud": []string{"api"}}},
		"one audience of two":   {claims: fields{"aud": []string{"elsewhere", accountIssuer}}},
		"audience as text":      {claims: fields{"aud": accountIssuer}},
		"no audience":           {claims: fields{"aud": nil}},
		"wrong issuer":          {claims: fields{"iss": accountIssuer + "/"}},
		"no issuer":             {claims: fields{"iss": nil}},
		"legacy issuer":         {claims: fields{"iss": "kubernetes/serviceaccount"}},
		"subject of another":    {claims: fields{"sub": "system:serviceaccount:default:other"}},
		"no subject":            {claims: fields{"sub": nil}},
		"no binding":            {claims: fields{"kubernetes.io": nil}},
		"binding is text":       {claims: fields{"kubernetes.io": "x"}},
		"unknown namespace":     {bound: fields{"namespace": "nowhere"}},
		"no namespace":          {bound: fields{"namespace": nil}},
		"unknown account":       {bound: fields{"serviceaccount": fields{"name": "nobody", "uid": "x"}}},
		"another uid":           {bound: fields{"serviceaccount": fields{"name": "robot", "uid": "x"}}},
		"no uid":                {bound: fields{"serviceaccount": fields{"name": "robot"}}},
		"no account":            {bound: fields{"serviceaccount": nil}},
		"gone account":          {bound: fields{"serviceaccount": fields{"name": "gone", "uid": "{{gone}}"}}},
		"bound to a pod":        {bound: fields{"pod": fields{"name": "pod", "uid": "{{pod}}"}}},
		"pod's uid is another":  {bound: fields{"pod": fields{"name": "pod", "uid": "x"}}},
		"pod is gone":           {bound: fields{"pod": fields{"name": "away", "uid": "x"}}},
		"pod and node": {bound: fields{"pod": fields{"name": "pod", "uid": "{{pod}}"},
			"node": fields{"name": "n1", "uid": "x"}}},
		"bound to a secret":       {bound: fields{"secret": fields{"name": "secret", "uid": "{{secret}}"}}},
		"secret's uid is another": {bound: fields{"secret": fields{"name": "secret", "uid": "x"}}},
		"secret is gone":          {bound: fields{"secret": fields{"name": "away", "uid": "x"}}},
		"bound to a node":         {bound: fields{"node": fields{"name": "n1", "uid": "{{node}}"}}},
		"node's uid is another":   {bound: fields{"node": fields{"name": "n1", "uid": "x"}}},
		"node is gone":            {bound: fields{"node": fields{"name": "away", "uid": "x"}}},
		"pod and secret": {bound: fields{"pod": fields{"name": "pod", "uid": "{{pod}}"},
			"secret": fields{"name": "secret", "uid": "{{secret}}"}}},
		"token's id":                 {claims: fields{"jti": "00000000-0000-0000-0000-000000000001"}},
		"warned after":               {bound: fields{"warnafter": now.Add(-time.Hour).Unix()}},
		"warned later":               {bound: fields{"warnafter": hour}},
		"no algorithm":               {header: fields{"alg": "none"}, key: []byte{}},
		"HMAC":                       {header: fields{"alg": "HS256"}, key: publicPEM(key)},
		"ES384 by the same key":      {header: fields{"alg": "ES384"}},
		"another curve":              {key: newKey(a.t, elliptic.P384())},
		"another key":                {key: newKey(a.t, elliptic.P256())},
		"unknown key name":           {header: fields{"kid": "gone"}},
		"no key name":                {header: fields{"kid": nil}},
		"unknown name, another key":  {header: fields{"kid": "gone"}, key: newKey(a.t, elliptic.P256())},
		"signature bent":             {bend: bent},
		"signature cut":              {bend: func(s string) string { return s[:len(s)-4] }},
		"signature missing":          {bend: func(s string) string { return s[:strings.LastIndex(s, ".")+1] }},
		"a part more":                {bend: func(s string) string { return s + ".x" }},
		"twice":                      {bend: func(s string) string { return s + "," + s }},
		"upper case":                 {bend: strings.ToUpper},
		"a claim more":               {claims: fields{"groups": []string{"system:masters"}, "email": "x"}},
		"huge":                       {claims: fields{"x": strings.Repeat("x", 30000)}},
		"name has a colon":           {bound: fields{"serviceaccount": fields{"name": "ro:bot", "uid": "x"}}},
		"namespace is another's":     {bound: fields{"namespace": "kube-system"}},
		"subject without namespaces": {claims: fields{"sub": "robot"}},
	} {
		c.tokens["account "+name] = func(s *side) string {
			bound := merge(fields{
				"namespace":      "default",
				"serviceaccount": fields{"name": "robot", "uid": "{{robot}}"},
			}, ch.bound)
			claims := fields{
				"iss": accountIssuer, "aud": []string{accountIssuer, "api"}, "sub": "system:serviceaccount:default:robot",
				"iat": now.Unix(), "nbf": now.Add(-time.Minute).Unix(), "exp": hour, "kubernetes.io": bound,
			}
			j := &token{header: merge(fields{"alg": "ES256", "kid": id}, ch.header), key: ch.key, bend: ch.bend,
				claims: filledIn(merge(claims, ch.claims), made[s])}
			if j.key == nil {
				j.key = key
			}
			return j.String()
		}
	}
	for _, name := range []string{"legacy", "legacy invalid", "requested", "requested audience", "requested pod"} {
		c.tokens["account "+name] = func(s *side) string { return made[s][name] }
	}
}

// filledIn replaces what stands for a side's own.
func filledIn(v fields, by map[string]string) fields {
	text, _ := json.Marshal(v)
	s := string(text)
	for k, val := range by {
		s = strings.ReplaceAll(s, "{{"+k+"}}", val)
	}
	out := fields{}
	_ = json.Unmarshal([]byte(s), &out)
	return out
}

// makeAccounts makes the objects of a side, and answers their uids and what tokens it issued.
func (a *axis) makeAccounts(s *side) map[string]string {
	a.t.Helper()
	c, ctx := s.server.Client().CoreV1(), a.t.Context()
	check := func(err error) {
		a.t.Helper()
		if err != nil {
			a.t.Fatalf("%s: %v", s.name, err)
		}
	}
	made := map[string]string{}
	for _, name := range []string{"default", "robot", "gone"} {
		sa, err := c.ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{
			ObjectMeta: metav1.ObjectMeta{Name: name},
		}, metav1.CreateOptions{})
		check(err)
		made[name] = string(sa.UID)
	}
	pod, err := c.Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod"},
		Spec: corev1.PodSpec{
			ServiceAccountName: "robot",
			Containers:         []corev1.Container{{Name: "c", Image: "i"}},
		},
	}, metav1.CreateOptions{})
	check(err)
	made["pod"] = string(pod.UID)
	node, err := c.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{})
	check(err)
	made["node"] = string(node.UID)
	secret, err := c.Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "secret"}},
		metav1.CreateOptions{})
	check(err)
	made["secret"] = string(secret.UID)
	a.requestTokens(s, made, check)
	a.legacyTokens(s, made, check)
	a.bootstrapTokens(s, check)
	check(c.ServiceAccounts("default").Delete(ctx, "gone", metav1.DeleteOptions{}))
	return made
}

// certificates are clients' certificates, good and bad.
func (a *axis) certificates(p *pair, c *credentials) {
	ca := authorityOf(a.t, p.theirs.server.CA)
	other := newAuthority(a.t, "ca") // the same name and another key
	subject := func(cn string, groups ...string) pkix.Name { return pkix.Name{CommonName: cn, Organization: groups} }
	add := func(name string, by *authority, s pkix.Name, change func(*x509.Certificate), between ...*authority) {
		t := template(s)
		if change != nil {
			change(t)
		}
		c.certificates = append(c.certificates, by.sign(name, t, between...))
	}
	middle, loose := ca.below("middle"), ca.below("loose")
	add("valid", ca, subject("carl", "dev", "ops"), nil)
	add("no groups", ca, subject("carl"), nil)
	add("masters", ca, subject("root", "system:masters"), nil)
	add("expired", ca, subject("carl"), func(t *x509.Certificate) { t.NotAfter = time.Now().Add(-time.Minute) })
	add("not yet", ca, subject("carl"), func(t *x509.Certificate) { t.NotBefore = time.Now().Add(time.Hour) })
	add("for servers", ca, subject("carl"), func(t *x509.Certificate) {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	add("for anything", ca, subject("carl"), func(t *x509.Certificate) {
		t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
	})
	add("no usage", ca, subject("carl"), func(t *x509.Certificate) { t.ExtKeyUsage = nil })
	add("another authority's", other, subject("carl", "system:masters"), nil)
	add("no name", ca, pkix.Name{Organization: []string{"system:masters"}}, nil)
	add("empty", ca, pkix.Name{}, nil)
	add("a system name", ca, subject("system:anonymous"), nil)
	add("a node", ca, subject("system:node:n1", "system:nodes"), nil)
	add("an account's name", ca, subject("system:serviceaccount:default:robot", "system:serviceaccounts"), nil)
	add("name twice", ca, pkix.Name{CommonName: "carl", ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "admin"},
	}}, nil)
	add("a uid", ca, pkix.Name{CommonName: "carl", ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-1"},
	}}, nil)
	add("two uids", ca, pkix.Name{ExtraNames: []pkix.AttributeTypeAndValue{
		{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "carl"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-1"},
		{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "uid-2"},
	}}, nil)
	add("group twice", ca, subject("carl", "dev", "dev"), nil)
	add("an empty group", ca, subject("carl", ""), nil)
	add("authenticated itself", ca, subject("carl", "system:authenticated", "system:unauthenticated"), nil)
	add("odd letters", ca, subject("ünï\tcode", "grüppe"), nil)
	add("long", ca, subject(strings.Repeat("n", 64), strings.Repeat("g", 64)), nil)
	add("many groups", ca, subject("carl", strings.Split(strings.Repeat("g,", 200)+"g", ",")...), nil)
	add("by a middle one", middle, subject("carl"), nil, middle)
	add("middle one missing", middle, subject("carl"), nil)
	add("wrong middle one", middle, subject("carl"), nil, loose)
	add("an authority itself", ca, subject("carl"), func(t *x509.Certificate) {
		t.IsCA, t.KeyUsage = true, x509.KeyUsageCertSign
	})
	add("a small serial number", ca, subject("carl"), func(t *x509.Certificate) { t.SerialNumber = big.NewInt(1) })
	add("the services' own name", ca, subject("system:watershed:authz", "dev"), nil)
}

// frontProxy sends the headers of one, by who may and who may not.
func (a *axis) frontProxy(p *pair) {
	ca := authorityOf(a.t, p.theirs.server.CA)
	by := func(cn string) *certificate { return ca.sign(cn, template(pkix.Name{CommonName: cn})) }
	proxies := []*certificate{by("front-proxy-client"), by("another-client"), nobody,
		newAuthority(a.t, "other").sign("stranger", template(pkix.Name{CommonName: "front-proxy-client"}))}
	for name, headers := range map[string]http.Header{
		"a user":           {"X-Remote-User": {"fred"}},
		"groups":           {"X-Remote-User": {"fred"}, "X-Remote-Group": {"a", "b"}},
		"groups in one":    {"X-Remote-User": {"fred"}, "X-Remote-Group": {"a,b"}},
		"extra":            {"X-Remote-User": {"fred"}, "X-Remote-Extra-Scopes": {"x", "y"}, "X-Remote-Extra-Acme.com%2fproject": {"p"}},
		"extra, odd":       {"X-Remote-User": {"fred"}, "X-Remote-Extra-%zz": {"x"}, "X-Remote-Extra-": {"none"}},
		"a uid":            {"X-Remote-User": {"fred"}, "X-Remote-Uid": {"u1"}},
		"masters":          {"X-Remote-User": {"fred"}, "X-Remote-Group": {"system:masters"}},
		"two users":        {"X-Remote-User": {"fred", "root"}},
		"an empty user":    {"X-Remote-User": {""}},
		"groups alone":     {"X-Remote-Group": {"system:masters"}},
		"anonymous":        {"X-Remote-User": {"system:anonymous"}},
		"and a token":      {"X-Remote-User": {"fred"}, "Authorization": {"Bearer filed-bob"}},
		"and a bad token":  {"X-Remote-User": {"fred"}, "Authorization": {"Bearer nonsense"}},
		"and impersonates": {"X-Remote-User": {"fred"}, "X-Remote-Group": {"system:masters"}, "Impersonate-User": {"gina"}},
		"a space":          {"X-Remote-User": {" fred "}},
		"nothing":          {},
	} {
		for _, proxy := range proxies {
			for _, r := range plain() {
				r.as, r.about = proxy, "front proxy "+proxy.name+": "+name
				r.more = func(*side) http.Header { return headers }
				p.askLater(r)
			}
		}
	}
}

// schemes sends good tokens in odd headers.
func (a *axis) schemes(p *pair) {
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("alice:filed-alice"))
	for _, values := range [][]string{
		{"bearer filed-alice"}, {"BEARER filed-alice"}, {"bEaReR filed-alice"}, {"Bearer  filed-alice"},
		{" Bearer filed-alice"}, {"Bearer filed-alice "}, {"Bearer filed-alice x"}, {"Bearer x filed-alice"},
		{"Bearer\tfiled-alice"}, {"Bearer"}, {"Bearer "}, {"Bearer  "}, {"Token filed-alice"}, {"filed-alice"}, {""},
		{basic}, {"Basic"}, {"Basic !"}, {"Digest x"}, {"Negotiate x"},
		{"Bearer filed-alice", "Bearer filed-bob"}, {"Bearer nonsense", "Bearer filed-bob"},
		{"Bearer filed-alice", "Bearer nonsense"}, {"Bearer filed-alice, Bearer filed-bob"}, {"", "Bearer filed-alice"},
		{basic, "Bearer filed-alice"}, {"Bearer filed-alice", basic},
	} {
		for _, as := range []*certificate{nobody, nil} {
			for _, r := range plain() {
				r.as, r.about = as, fmt.Sprintf("authorization %q", values)
				r.more = func(*side) http.Header { return http.Header{"Authorization": values} }
				p.askLater(r)
			}
		}
	}
	bearer := "base64url.bearer.authorization.k8s.io."
	good := bearer + base64.RawURLEncoding.EncodeToString([]byte("filed-alice"))
	for _, values := range [][]string{
		{good}, {good + ", v4.channel.k8s.io"}, {"v4.channel.k8s.io", good}, {good, good, "x"}, {good + "," + good + ",x"},
		{bearer + ", x"}, {bearer + "!!!, x"}, {bearer + "_w, x"}, {strings.ToUpper(good) + ", x"}, {"x"}, {""}, {","},
		{good + "=, x"}, {" " + good + " , x "},
	} {
		for _, upgrade := range []http.Header{
			{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}}, {"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"WebSocket"}}, {},
		} {
			for _, r := range plain() {
				r.as, r.about = nobody, fmt.Sprintf("subprotocol %q", values)
				r.more = func(*side) http.Header {
					h := upgrade.Clone()
					h["Sec-Websocket-Protocol"] = values
					return h
				}
				p.askLater(r)
			}
		}
	}
}

// issuerDocuments are the OpenID documents of service accounts' issuer.
func (a *axis) issuerDocuments(p *pair) {
	for _, as := range []*certificate{nil, nobody} {
		for _, path := range []string{"/.well-known/openid-configuration", "/openid/v1/jwks", "/.well-known/", "/openid/v1",
			"/.well-known/openid-configuration/"} {
			for _, accept := range []string{"", "application/json", "application/jwk-set+json", "text/plain"} {
				r := &request{
					method: http.MethodGet,
					path:   path,
					as:     as,
					about:  "OpenID documents",
					header: map[string]string{},
				}
				if accept != "" {
					r.header["Accept"] = accept
				}
				p.askLater(r)
			}
		}
	}
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
