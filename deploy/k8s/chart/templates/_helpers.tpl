{{/* watershed.image returns the name of an image with the registry and the tag of the values. Images of other projects
stay. The argument is (list $ image). */}}
{{- define "watershed.image" -}}
{{- $values := (index . 0).Values -}}
{{- $image := index . 1 -}}
{{- if hasPrefix "watershed.dev/" $image -}}
{{- $image = printf "%s/%s" $values.image.registry (trimPrefix "watershed.dev/" $image) -}}
{{- with $values.image.tag }}{{ $image = printf "%s:%s" (regexReplaceAll "(:[^/@]+)?(@.+)?$" $image "") . }}{{ end -}}
{{- end -}}
{{- $image -}}
{{- end }}

{{/* watershed.pod writes the settings of a workload into its pod template. The argument is (list $ template settings). */}}
{{- define "watershed.pod" -}}
{{- $values := (index . 0).Values -}}
{{- $template := index . 1 -}}
{{- $w := index . 2 -}}
{{- $spec := $template.spec -}}
{{- range $c := $spec.containers -}}
{{- $_ := set $c "image" (include "watershed.image" (list (index $ 0) $c.image)) -}}
{{- with $values.image.pullPolicy }}{{ $_ := set $c "imagePullPolicy" . }}{{ end -}}
{{- with $w.resources }}{{ $_ := set $c "resources" (mergeOverwrite (deepCopy $c.resources) .) }}{{ end -}}
{{- with $w.args }}{{ $_ := set $c "args" (concat ($c.args | default list) .) }}{{ end -}}
{{- with $w.volumeMounts }}{{ $_ := set $c "volumeMounts" (concat ($c.volumeMounts | default list) .) }}{{ end -}}
{{- with $w.env -}}
{{- $names := list }}{{ range . }}{{ $names = append $names .name }}{{ end -}}
{{- $kept := list }}{{ range $c.env }}{{ if not (has .name $names) }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $_ := set $c "env" (concat $kept .) -}}
{{- end -}}
{{- end -}}
{{- with $w.volumes }}{{ $_ := set $spec "volumes" (concat ($spec.volumes | default list) .) }}{{ end -}}
{{- with $w.pod }}{{ $_ := set $template "spec" (mergeOverwrite $spec (deepCopy .)) }}{{ end -}}
{{- range $field, $more := dict "annotations" $w.podAnnotations "labels" $w.podLabels -}}
{{- with $more }}{{ $_ := set $template.metadata $field (merge (deepCopy .) (get $template.metadata $field | default dict)) }}{{ end -}}
{{- end -}}
{{- $secrets := list }}{{ range $values.image.pullSecrets }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- with $secrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end -}}
{{- end }}
