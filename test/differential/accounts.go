package main

import (
	"crypto"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"watershed.dev/test/harness"
)

// keyID returns kube-apiserver's ID of a key (k8s.io/kubernetes/pkg/serviceaccount, keyIDFromPublicKey).
func keyID(t testing.TB, key crypto.Signer) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// requestTokens requests tokens from a side with TokenRequests.
func (a *axis) requestTokens(s *side, made map[string]string, check func(error)) {
	for name, spec := range map[string]authenticationv1.TokenRequestSpec{
		"requested":          {},
		"requested audience": {Audiences: []string{"elsewhere"}},
		"requested pod": {BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: "pod",
		}},
	} {
		got, err := s.server.Client().CoreV1().ServiceAccounts("default").CreateToken(a.t.Context(), "robot",
			&authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
		check(err)
		made[name] = got.Status.Token
	}
}

// legacyTokens creates token Secrets, as the token controller does: a valid token and an invalidated token.
func (a *axis) legacyTokens(s *side, made map[string]string, check func(error)) {
	// "legacy" is the token of a controller, which adds its Secret to the account. The other was created by hand.
	_, err := s.server.Client().CoreV1().ServiceAccounts("default").Patch(a.t.Context(), "robot",
		types.StrategicMergePatchType, []byte(`{"secrets":[{"name":"token-6"}]}`), metav1.PatchOptions{})
	check(err)
	key := keyFile(a.t, s.server.SAKey)
	for name, labels := range map[string]map[string]string{
		"legacy":         nil,
		"legacy invalid": {"kubernetes.io/legacy-token-invalid-since": "2020-01-01"},
	} {
		secret := "token-" + fmt.Sprint(len(name))
		j := &token{header: fields{"alg": "ES256", "kid": keyID(a.t, key)}, key: key, claims: fields{
			"iss":                                    "kubernetes/serviceaccount",
			"sub":                                    "system:serviceaccount:default:robot",
			"kubernetes.io/serviceaccount/namespace": "default",
			"kubernetes.io/serviceaccount/secret.name":          secret,
			"kubernetes.io/serviceaccount/service-account.name": "robot",
			"kubernetes.io/serviceaccount/service-account.uid":  made["robot"],
		}}
		made[name] = j.String()
		_, err := s.server.Client().CoreV1().Secrets("default").Create(a.t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: secret, Labels: labels, Annotations: map[string]string{
				"kubernetes.io/service-account.name": "robot", "kubernetes.io/service-account.uid": made["robot"],
			}},
			Type: corev1.SecretTypeServiceAccountToken,
			Data: map[string][]byte{"token": []byte(made[name])},
		}, metav1.CreateOptions{})
		check(err)
	}
}

// bootstrapTokens creates Secrets of bootstrap tokens, good and bad, and waits until the side accepts the good ones.
func (a *axis) bootstrapTokens(s *side, check func(error)) {
	secrets := s.server.Client().CoreV1().Secrets(metav1.NamespaceSystem)
	for id, change := range map[string]map[string]string{
		"abcdef": {},
		"expird": {"expiration": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)},
		"noauth": {"usage-bootstrap-authentication": "false"},
		"nogrps": {"auth-extra-groups": ""},
		"badgrp": {"auth-extra-groups": "system:masters"},
		"zzzzzz": {},
	} {
		data := map[string]string{
			"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
			"auth-extra-groups": "system:bootstrappers:workers",
		}
		for k, v := range change {
			data[k] = v
		}
		_, err := secrets.Create(a.t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id},
			Type:       corev1.SecretTypeBootstrapToken,
			StringData: data,
		}, metav1.CreateOptions{})
		check(err)
	}
	r := plain()[0]
	r.as, r.header = noCertificate,
		merged(r.header, map[string]string{"Authorization": "Bearer zzzzzz.0123456789abcdef"})
	harness.Eventually(a.t, harness.Soon, func() error {
		if got := s.do(a.t.Context(), r); got.code != 201 {
			return fmt.Errorf("%s does not know its bootstrap tokens: %d %s", s.name, got.code, got.body)
		}
		return nil
	})
}

// accounts creates service accounts, the objects that their tokens are bound to, and the tokens, on both sides.
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
		"expired within leeway": {claims: fields{"exp": now.Add(-5 * time.Second).Unix()}},
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
				"iss": accountIssuer, "aud": []string{accountIssuer, "api"},
				"sub": "system:serviceaccount:default:robot",
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

// filledIn replaces the placeholders of a side's own values.
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

// makeAccounts creates a side's objects, and returns their UIDs and the tokens that the side issued.
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
